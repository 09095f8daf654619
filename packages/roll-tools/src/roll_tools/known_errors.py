"""Known errors of torch, its libraries and the machine, each with its cause in a run and a remedy."""

from __future__ import annotations

from roll_core.spec.diagnostics import KnownError

OUT_OF_DEVICE_MEMORY = (
    r"^OutOfMemoryError: .*(CUDA|HIP|NPU|XPU)|(CUDA|HIP|NPU) out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
PLAN = "`roll-core plan CONFIG` shows each role's memory by phase and the smallest change that fits"

KNOWN_ERRORS: tuple[KnownError, ...] = (
    KnownError(
        id="device_memory_in_training",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("update", "forward_backward", "optimizer_step"),
        cause="A device has too little memory for a training step.",
        remedy="lower training_args.per_device_train_batch_size and raise gradient_accumulation_steps by the same"
        " factor, or set use_dynamic_batching_in_train with a token budget; keep disable_gradient_checkpointing:"
        " false; distribute the model over more ranks (fsdp2, deepspeed with ZeRO 3, megatron with tensor"
        " parallelism), or keep optimizer states on the host (the strategy's offload keys); train adapters"
        f" (lora_target). {PLAN}",
    ),
    KnownError(
        id="device_memory_in_scoring",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("score", "forward"),
        cause="A device has too little memory for the logprobs or values of a microbatch.",
        remedy="lower the role's infer_batch_size, or set use_dynamic_batching_in_infer with a token budget; lower"
        f" strategy_config.logprob_chunk_tokens; distribute the model over more ranks. {PLAN}",
    ),
    KnownError(
        id="device_memory_in_rollouts",
        pattern=OUT_OF_DEVICE_MEMORY,
        during=("submit", "result", "generate", "wake", "receive_weights"),
        cause="A device has too little memory for the engine and the other processes on it.",
        remedy="reserve less memory for the engine (gpu_memory_utilization, mem_fraction_static, kv_cache_gib) or"
        " lower max_num_seqs; raise tensor_parallel_size; keep is_offload_states: true, so that roles on the same"
        f" slots offload for each other, or use separate slots for actor_infer. {PLAN}",
    ),
    KnownError(
        id="device_memory",
        pattern=OUT_OF_DEVICE_MEMORY,
        cause="A device has too little memory for the model and its buffers.",
        remedy="distribute the model over more ranks, or use fp8, bf16 or adapters if the strategy supports them;"
        f" check with `roll-core doctor CONFIG` whether other processes use memory of the device. {PLAN}",
    ),
    KnownError(
        id="host_memory",
        pattern=r"DefaultCPUAllocator: (can't|not enough)|^MemoryError|Cannot allocate memory|std::bad_alloc"
        r"|killed .* for lack of memory|node running low on memory",
        cause="The host's memory is exhausted, or a limit for the process was reached.",
        remedy="keep less on the host: fewer workers on it (world_size, reward processes), no CPU offload, smaller"
        " kv_cache_gib and microbatches on `platform: cpu`; raise the container's limit. `roll-core plan CONFIG` shows"
        " what each host needs",
    ),
    KnownError(
        id="shared_memory",
        pattern=r"unable to (allocate|open|mmap|resize) shared memory|/dev/shm|Bus error|SIGBUS",
        cause="/dev/shm is full or too small.",
        remedy="start the container with --shm-size=16g or --ipc=host; check its size with `roll-core doctor`, and"
        " delete files in /dev/shm that no process uses",
    ),
    KnownError(
        id="disk_full",
        pattern=r"No space left on device|Disk quota exceeded",
        cause="The disk or your quota is full.",
        remedy="free space, or set output_dir to another disk; max_ckpt_to_keep deletes older checkpoints, and a"
        " larger save_steps writes fewer. Then continue with resume_from_checkpoint: auto",
    ),
    KnownError(
        id="open_files",
        pattern=r"Too many open files|received 0 items of ancdata",
        cause="A process reached its limit of open files and connections.",
        remedy="raise the limit where the run and Ray are started: `ulimit -n 65536` (docker: --ulimit"
        " nofile=65536:65536)",
    ),
    KnownError(
        id="backend_compiler_failed",
        pattern=r"BackendCompilerFailed|InductorError|^TypeError: .*BackendCompilerFailed\.__init__",
        cause="torch.compile failed for a part of the model, or of a library such as Transformer Engine.",
        remedy="set system_envs: {NVTE_TORCH_COMPILE: '0'} if the traceback names transformer_engine, otherwise"
        " {TORCH_COMPILE_DISABLE: '1'}; for engines set enforce_eager: true in strategy_config",
    ),
    KnownError(
        id="no_kernel_image",
        pattern=r"no kernel image is available for execution|cudaErrorNoKernelImageForDevice",
        cause="torch or an extension was not built for the compute capability of this device.",
        remedy="install a torch build for the device (`roll-core doctor` shows both); for kernels that are compiled"
        " on this host, set TORCH_CUDA_ARCH_LIST to the device's capability and delete the previously compiled ones",
    ),
    KnownError(
        id="driver_too_old",
        pattern=r"driver (version is insufficient|on your system is too old)|cudaErrorInsufficientDriver",
        cause="The NVIDIA driver is older than the CUDA version of torch.",
        remedy="update the driver, or install a torch build for an older CUDA; `roll-core doctor` shows both versions",
    ),
    KnownError(
        id="no_device",
        pattern=r"Found no NVIDIA driver|No (CUDA|HIP) GPUs are available|[Tt]orch not compiled with CUDA enabled"
        r"|no CUDA-capable device is detected|No CUDA runtime is found",
        cause="torch finds no device, but the run needs one.",
        remedy="check with `nvidia-smi` or `rocm-smi` whether the host has one (a container needs --gpus all), that"
        " CUDA_VISIBLE_DEVICES is not empty, and that torch is not a CPU build; or use platform: cpu. To compile"
        " kernels on a host without a device set FORCE_CUDA=1",
    ),
    KnownError(
        id="cuda_home",
        pattern=r"CUDA_HOME environment variable is not set|CUDA_HOME is not set|nvcc(: | was )not found"
        r"|No such file or directory: '?\S*nvcc",
        cause="A CUDA kernel must be compiled, but the CUDA toolkit was not found.",
        remedy="install the CUDA toolkit of torch's version and set CUDA_HOME: `export CUDA_HOME=/usr/local/cuda`",
    ),
    KnownError(
        id="cuda_mismatch",
        pattern=r"detected CUDA version .*mismatches the version that was used to compile"
        r"|System CUDA version does not match|System CUDA .* != PyTorch CUDA",
        cause="The CUDA toolkit has a different major version than the CUDA of torch.",
        remedy="install the toolkit of torch's version (python -c 'import torch; print(torch.version.cuda)') and set"
        " CUDA_HOME to it; `roll-core doctor` compares them",
    ),
    KnownError(
        id="flash_attention_hardware",
        pattern=r"FlashAttention only supports Ampere|Expected is_sm80 \|\| is_sm90"
        r"|FlashAttention.* requires .*[Aa]mpere",
        cause="Flash attention needs an Ampere GPU or a newer one.",
        remedy="set model_args.attn_implementation: sdpa for roles that train or score, and the engine's own"
        " attention key for roles that generate",
    ),
    KnownError(
        id="flash_attention_missing",
        pattern=r"(FlashAttention2|flash_attention_2) .*(cannot be used|not.* installed)|No module named 'flash_attn",
        cause="The config selects the package flash-attn, which is not installed.",
        remedy="remove model_args.attn_implementation: auto selects the fastest exact attention that is installed; or"
        " pip install flash-attn --no-build-isolation",
    ),
    KnownError(
        id="torchvision_build",
        pattern=r"operator torchvision::\w+ does not exist|Could not load this library: \S*torch(vision|audio|codec)",
        cause="torchvision, torchaudio or torchcodec was built for a different torch, for example for CUDA next to a"
        " CPU build of torch.",
        remedy="pip uninstall -y torchvision torchaudio torchcodec, in the environment of the failed role: neither"
        " ROLL nor its engines need them for text; or install the builds for this torch (`roll-core doctor` compares"
        " them)",
    ),
    KnownError(
        id="undefined_symbol",
        pattern=r"undefined symbol: \S*(c10|torch|at\d|_Z)|DLL load failed",
        cause="A compiled package was built for a different torch version than the installed one.",
        remedy="install the package's build for this torch, or the torch version that it requires (`roll-core doctor`"
        " lists the ranges of each plugin); roles with conflicting requirements can have separate Python"
        " environments (environment:)",
    ),
    KnownError(
        id="collective_timeout",
        pattern=r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ms for|wait timeout after \d+ms"
        r"|Socket Timeout|[Tt]imed out after \d+ seconds waiting for (clients|all)",
        cause="Ranks waited for a rank that did not join a collective: it is slow, has failed, or runs different code.",
        remedy="find the first error of any rank in the log; raise rpc_timeout if a step really takes that long;"
        " between hosts see collective_network",
    ),
    KnownError(
        id="collective_network",
        pattern=r"NCCL [Ee]rror|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|ncclInternalError"
        r"|connectFullMesh failed|Unable to find (address|interface)|No route to host",
        cause="Ranks cannot communicate by NCCL or gloo.",
        remedy="set system_envs: {NCCL_DEBUG: INFO} and read its output; set NCCL_SOCKET_IFNAME and"
        " GLOO_SOCKET_IFNAME to the interface between the hosts; in containers provide enough /dev/shm and use the"
        " host's network; rule out InfiniBand with NCCL_IB_DISABLE=1",
    ),
    KnownError(
        id="device_assert",
        pattern=r"device-side assert triggered|illegal memory access",
        cause="A kernel failed. It may have been started before the line that the traceback shows.",
        remedy="run once with system_envs: {CUDA_LAUNCH_BLOCKING: '1'} to get the right line; the most frequent cause"
        " is a token id outside the model's vocabulary: the tokenizer does not belong to the model",
    ),
    KnownError(
        id="hub_gated",
        pattern=r"GatedRepoError|gated repo|401 Client Error|403 Client Error",
        cause="Your account has no access to the model or data on the Hugging Face Hub.",
        remedy="accept its terms on its page of the Hub, and log in on every host (`hf auth login`, or HF_TOKEN)",
    ),
    KnownError(
        id="hub_unreachable",
        pattern=r"couldn't connect to 'https?://|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Max retries exceeded with url"
        r"|Name or service not known|Temporary failure in name resolution",
        cause="A model or data must be downloaded, but the Hugging Face Hub cannot be reached.",
        remedy="use a directory (pretrain: /path/to/model), or download the files before, on a host that reaches the"
        " Hub; set HF_ENDPOINT to a mirror, and unset HF_HUB_OFFLINE if it was set by mistake",
    ),
)
