"""Replay in RL trainers that stay unedited: one module a trainer, which hooks its functions by name.

    trainers.slime, trainers.miles          --custom-megatron-init-path megatron_router_replay.trainers.slime.init
    trainers.nemo_rl, trainers.skyrl        imported by the trainer's processes
    trainers.roll                           RAY_RUNTIME_ENV_HOOK=megatron_router_replay.trainers.roll.runtime_env
    trainers.ms_swift                       imported by a file that ms-swift's --external_plugins names
    trainers.megatron_rl                    imported by train_rl.py, or python -m with train_rl.py
    trainers.verl                           verl's plug-in
    trainers.replayer                       common to all: a schedule of Megatron-Core's runs in a session
    trainers.audit                          MRR_AUDIT=1: the trainer's own replay, compared with the rollout's routes
    trainers.seams                          which functions are hooked; `python -m` checks a checkout

Importing a trainer's module does not import the trainer.
"""

__all__: list[str] = []
