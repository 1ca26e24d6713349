"""A benchmark for GPUs: `report` is its table, `bench` the device, `step` the model and its modes, `guard` the processes."""
