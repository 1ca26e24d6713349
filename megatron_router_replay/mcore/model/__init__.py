"""A Megatron-Core model: its routers, its layers, its version, and the settings that replay refuses."""
