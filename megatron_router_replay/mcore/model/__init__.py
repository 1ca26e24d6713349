"""What a Megatron-Core model is: its routers, its layers, its version, and what cannot be replayed."""
