"""See `standin`, `unpinned`, `latent_attention`, `local_experts`, `expert_faults` and `attention_faults`."""

import attention_faults
import expert_faults
import torch
from latent_attention import absorb_always
from local_experts import skip_experts_of_other_ranks
from standin import stand_in
from unpinned import leave_unpinned

__version__ = "0.4.7"
__getattr__ = stand_in(__name__)


class HostMemory:
    """SGLang tells CUDA's runtime of the memory into which it copies the experts that tokens went through, also where
    the device is the host."""

    @staticmethod
    def cudaHostRegister(address, size, flags):
        return 0

    @staticmethod
    def cudaHostUnregister(address):
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = HostMemory
leave_unpinned()
skip_experts_of_other_ranks()
absorb_always()
expert_faults.install()
attention_faults.install()
