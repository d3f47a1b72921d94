"""From a model's config.json to the pools that hold its cache."""
