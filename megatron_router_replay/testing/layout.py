"""ParallelSizes: parallel sizes in Megatron's words, and Megatron's parallel state from them."""

import math
from dataclasses import dataclass

from megatron_router_replay.errors import RouterReplayError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Parallel sizes in Megatron's words; ranks left over are data parallel.

    `vp_size` is the number of model chunks per pipeline stage, None without interleaving. As in Megatron, expert
    parallelism spans the tensor- and data-parallel ranks: tp_size=2 and ep_size=2 need two processes.
    """

    tp_size: int = 1
    pp_size: int = 1
    vp_size: int | None = None
    cp_size: int = 1
    ep_size: int = 1
    expert_tp_size: int = 1

    def __post_init__(self) -> None:
        sizes = (self.tp_size, self.pp_size, self.cp_size, self.ep_size, self.expert_tp_size)
        if min(sizes) < 1 or (self.vp_size is not None and (self.vp_size < 2 or self.pp_size < 2)):
            raise RouterReplayError(
                f"MRR904: {self} is no layout: sizes start at 1, and vp_size needs at least 2 chunks and pp_size >= 2."
            )

    @property
    def sequence_parallel(self) -> bool:
        """Return if sequence parallelism is on. Megatron trains MoE layers under tensor parallelism only with it."""
        return self.tp_size > 1

    @property
    def num_chunks(self) -> int:
        """Model chunks on each pipeline stage."""
        return self.vp_size or 1

    @property
    def world_size(self) -> int:
        """The smallest number of processes that this layout fits."""
        return self.pp_size * math.lcm(self.tp_size * self.cp_size, self.expert_tp_size * self.ep_size)

    def initialize(self, *, seed: int = 1234) -> None:
        """Create Megatron's process groups and seed its random states. Every process of the layout calls it.

        Raises:
            RouterReplayError: the number of processes is not a multiple of `world_size`.
        """
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        if dist.get_world_size() % self.world_size != 0:
            raise RouterReplayError(
                f"MRR904: cannot lay out {self} on {dist.get_world_size()} processes: not a multiple of {self.world_size}."
            )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp_size,
            pipeline_model_parallel_size=self.pp_size,
            virtual_pipeline_model_parallel_size=self.vp_size,
            context_parallel_size=self.cp_size,
            expert_model_parallel_size=self.ep_size,
            expert_tensor_parallel_size=self.expert_tp_size,
            create_gloo_process_groups=False,  # Megatron would add them to NCCL's; here the groups are gloo's already
        )
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
