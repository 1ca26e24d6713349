"""Record, replay and freeze: a model's routers, held and released."""
