"""The benchmark for a GPU: `report` is its table, `bench` the device, `step` and `parts` what is run, `guard` who runs it."""
