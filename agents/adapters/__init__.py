"""From what people have (a model's config.json, an engine's structs) to what a rank registers."""
