"""Record, replay and freeze: a model's routers, registered and released."""
