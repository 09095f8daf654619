"""Known errors of torch, its libraries, Ray and the machine, each with its cause in a run and a remedy."""

from __future__ import annotations

from roll_core.spec.known_errors import KnownError

OUT_OF_DEVICE_MEMORY = (
    r"^OutOfMemoryError: .*(CUDA|HIP|NPU|XPU)|(CUDA|HIP|NPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
PLAN = "`roll-core plan CONFIG` shows each role's memory by phase and the smallest change that fits"

KNOWN_ERRORS: tuple[KnownError, ...] = (
    KnownError(
        id="device_memory_in_training",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("update", "forward_backward", "optimizer_step"),
        cause="A device's memory is too small for what a training step holds.",
        remedy="lower training_args.per_device_train_batch_size and raise gradient_accumulation_steps by the same"
        " factor,"
        " or set use_dynamic_batching_in_train with a budget of tokens; keep disable_gradient_checkpointing: false;"
        " spread"
        " the model over more ranks (fsdp2, deepspeed with ZeRO 3, megatron with tensor parallelism), or keep optimizer"
        f" states on the host (the strategy's offload keys); train adapters (lora_target). {PLAN}",
    ),
    KnownError(
        id="device_memory_in_scoring",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("score", "forward"),
        cause="A device's memory is too small for the logprobs or values of a microbatch.",
        remedy="lower the role's infer_batch_size, or set use_dynamic_batching_in_infer with a budget of tokens; lower"
        f" strategy_config.logprob_chunk_tokens; spread the model over more ranks. {PLAN}",
    ),
    KnownError(
        id="device_memory_in_rollouts",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("submit", "result", "generate", "wake", "receive_weights"),
        cause="A device's memory is too small for the engine beside what else is on it.",
        remedy="give the engine a smaller share (gpu_memory_utilization, mem_fraction_static, kv_cache_gib) or fewer"
        " sequences at once (max_num_seqs); raise tensor_parallel_size; keep is_offload_states: true, so that roles"
        " which"
        f" share slots make room for each other, or give actor_infer slots of its own. {PLAN}",
    ),
    KnownError(
        id="device_memory",
        pattern=OUT_OF_DEVICE_MEMORY,
        cause="A device's memory is too small for the model and what belongs to it.",
        remedy="spread the model over more ranks, or take fp8, bf16 or adapters where the strategy has them; see with"
        f" `roll-core doctor CONFIG` whether other processes hold memory of the device. {PLAN}",
    ),
    KnownError(
        id="host_memory",
        pattern=r"DefaultCPUAllocator: (can't|not enough)|^MemoryError|Cannot allocate memory|std::bad_alloc"
        r"|killed .* for lack of memory|node running low on memory",
        cause="The host's memory is too small, or a process got no more of it.",
        remedy="keep less on the host: fewer workers on it (world_size, reward processes), no CPU offload, smaller"
        " kv_cache_gib and microbatches on `platform: cpu`; raise the container's limit. `roll-core plan CONFIG` shows"
        " what each host needs",
    ),
    KnownError(
        id="shared_memory",
        pattern=r"unable to (allocate|open|mmap|resize) shared memory|/dev/shm|Bus error|SIGBUS",
        cause="/dev/shm is full or too small.",
        remedy="start the container with --shm-size=16g or --ipc=host; `roll-core doctor` shows how large it is, and"
        " files in /dev/shm that no process uses can go",
    ),
    KnownError(
        id="disk_full",
        pattern=r"No space left on device|Disk quota exceeded",
        cause="The disk, or your share of it, is full.",
        remedy="make room, or write elsewhere with output_dir; max_ckpt_to_keep removes older checkpoints, and a larger"
        " save_steps writes fewer. Then resume_from_checkpoint: auto goes on",
    ),
    KnownError(
        id="open_files",
        pattern=r"Too many open files|received 0 items of ancdata",
        cause="A process may have no more files and connections open.",
        remedy="raise the limit where the run is started, and where Ray was: `ulimit -n 65536` (docker: --ulimit"
        " nofile=65536:65536)",
    ),
    KnownError(
        id="backend_compiler_failed",
        pattern=r"BackendCompilerFailed|InductorError|^TypeError: .*BackendCompilerFailed\.__init__",
        cause="torch.compile could not compile a piece of the model or of a library such as Transformer Engine.",
        remedy="set system_envs: {NVTE_TORCH_COMPILE: '0'} where the trace names transformer_engine, else"
        " {TORCH_COMPILE_DISABLE: '1'}; engines have enforce_eager: true in strategy_config",
    ),
    KnownError(
        id="no_kernel_image",
        pattern=r"no kernel image is available for execution|cudaErrorNoKernelImageForDevice",
        cause="torch, or an extension, was not built for this device's compute capability.",
        remedy="install a torch built for the device (`roll-core doctor` shows both); for kernels compiled here set"
        " TORCH_CUDA_ARCH_LIST to the device's capability, and remove those that were compiled before",
    ),
    KnownError(
        id="driver_too_old",
        pattern=r"driver (version is insufficient|on your system is too old)|cudaErrorInsufficientDriver",
        cause="The NVIDIA driver is older than the CUDA that torch was built with.",
        remedy="update the driver, or install a torch built with an older CUDA; `roll-core doctor` shows the two"
        " versions",
    ),
    KnownError(
        id="no_device",
        pattern=r"Found no NVIDIA driver|No (CUDA|HIP) GPUs are available|[Tt]orch not compiled with CUDA enabled"
        r"|no CUDA-capable device is detected|No CUDA runtime is found",
        cause="torch sees no device where the run wants one.",
        remedy="see with `nvidia-smi` or `rocm-smi` whether the host does (a container needs --gpus all), that"
        " CUDA_VISIBLE_DEVICES is not empty, and that torch is not the build for CPUs; or run on platform: cpu. To"
        " compile"
        " kernels on a host without a device set FORCE_CUDA=1",
    ),
    KnownError(
        id="cuda_home",
        pattern=r"CUDA_HOME environment variable is not set|CUDA_HOME is not set|nvcc(: | was )not found"
        r"|No such file or directory: '?\S*nvcc",
        cause="Something is to be compiled for CUDA, and there is no toolkit where it is looked for.",
        remedy="install the CUDA toolkit of torch's version and set CUDA_HOME to it: `export"
        " CUDA_HOME=/usr/local/cuda`",
    ),
    KnownError(
        id="cuda_mismatch",
        pattern=r"detected CUDA version .*mismatches the version that was used to compile"
        r"|System CUDA version does not match|System CUDA .* != PyTorch CUDA",
        cause="The CUDA toolkit has another major version than the one that torch was built with.",
        remedy="install the toolkit of torch's version (python -c 'import torch; print(torch.version.cuda)') and point"
        " CUDA_HOME at it; `roll-core doctor` compares them",
    ),
    KnownError(
        id="flash_attention_hardware",
        pattern=r"FlashAttention only supports Ampere|Expected is_sm80 \|\| is_sm90"
        r"|FlashAttention.* requires .*[Aa]mpere",
        cause="Flash attention needs an Ampere GPU or a newer one.",
        remedy="set model_args.attn_implementation: sdpa for roles that train or score, and the engine's own attention"
        " key for those that generate",
    ),
    KnownError(
        id="flash_attention_missing",
        pattern=r"(FlashAttention2|flash_attention_2) .*(cannot be used|not.* installed)|No module named 'flash_attn",
        cause="The config asks for the package flash-attn, which is not installed.",
        remedy="leave model_args.attn_implementation out: auto takes the fastest exact attention that is here; or"
        " pip install flash-attn --no-build-isolation",
    ),
    KnownError(
        id="torchvision_build",
        pattern=r"operator torchvision::\w+ does not exist|Could not load this library: \S*torch(vision|audio|codec)",
        cause="torchvision, torchaudio or torchcodec was built for another torch: for CUDA, beside a torch for CPUs.",
        remedy="pip uninstall -y torchvision torchaudio torchcodec, in the environment of the role that failed: neither"
        " ROLL nor its engines need them for text; or install the builds that belong to this torch (`roll-core doctor`"
        " compares them)",
    ),
    KnownError(
        id="undefined_symbol",
        pattern=r"undefined symbol: \S*(c10|torch|at\d|_Z)|DLL load failed",
        cause="A compiled package was built for another version of torch than the one that is installed.",
        remedy="install the build that belongs to this torch, or the torch that the package asks for (`roll-core"
        " doctor`"
        " lists each plugin's ranges); roles whose packages contradict each other can have a Python environment of"
        " their"
        " own (environment:)",
    ),
    KnownError(
        id="collective_timeout",
        pattern=r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ms for|wait timeout after \d+ms"
        r"|Socket Timeout|[Tt]imed out after \d+ seconds waiting for (clients|all)",
        cause="Ranks waited for one that did not take part: it is slow, has failed, or does something else.",
        remedy="look in the log for the rank that said something first; raise rpc_timeout where a step is really that"
        " long; between hosts see collective_network",
    ),
    KnownError(
        id="collective_network",
        pattern=r"NCCL [Ee]rror|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|ncclInternalError"
        r"|connectFullMesh failed|Unable to find (address|interface)|No route to host",
        cause="Ranks could not talk to each other by NCCL or gloo.",
        remedy="set system_envs: {NCCL_DEBUG: INFO} and read what it says; name the interface between the hosts with"
        " NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; in containers give enough /dev/shm and the host's network; try"
        " NCCL_IB_DISABLE=1 to rule InfiniBand out",
    ),
    KnownError(
        id="device_assert",
        pattern=r"device-side assert triggered|illegal memory access",
        cause="A kernel failed; the line that is named need not be the one that started it.",
        remedy="run once with system_envs: {CUDA_LAUNCH_BLOCKING: '1'} to see the line; most often a token id is"
        " outside of"
        " the model's vocabulary: the tokenizer does not belong to the model",
    ),
    KnownError(
        id="hub_gated",
        pattern=r"GatedRepoError|gated repo|401 Client Error|403 Client Error",
        cause="The model or data on the Hugging Face hub is not open to you.",
        remedy="accept its terms on the hub's page, and log in on every host (`hf auth login`, or HF_TOKEN)",
    ),
    KnownError(
        id="hub_unreachable",
        pattern=r"couldn't connect to 'https?://|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Max retries exceeded with url"
        r"|Name or service not known|Temporary failure in name resolution",
        cause="A model or data is to be downloaded, and the hub cannot be reached.",
        remedy="name a directory (pretrain: /path/to/model), or download it first on a host that reaches the hub; set"
        " HF_ENDPOINT where you have a mirror, and unset HF_HUB_OFFLINE where it is not meant",
    ),
    KnownError(
        id="ray_start",
        pattern=r"node timed out during startup|Failed to (connect to|start) (GCS|the dashboard|Ray)"
        r"|Could not find any running Ray instance|ray\.init\(\) timed out",
        cause="Ray did not come up, or none answers at the address that is named.",
        remedy="see `roll-core doctor`; unset RAY_ADDRESS for a Ray of the run's own, or start one (`ray start"
        " --head`);"
        " remove the leftovers of a Ray that was killed (`ray stop --force`, /tmp/ray)",
    ),
)
