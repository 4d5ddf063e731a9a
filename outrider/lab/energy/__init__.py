"""Energy: joules of a run from the machine's own counters, or an estimate where it has none.

rapl      processor packages and memory, by the kernel's counters (Linux, Intel and AMD)
nvml      NVIDIA GPUs, by the energy counter of NVML; their power, for polling
polling   energy from samples of power, as the MJSD paper measured it, or by the trapezoidal rule
counters  reads several counters around a run, and subtracts what the machine draws when idle
model     the two-term model E = P_mem T_mem + P_flop T_flop: an estimate
passes    counts the bytes and operations of forward passes, which the model needs
meters    all of these, registered for ``outrider bench``

Counters measure the whole machine, or the whole GPU: other work on it is in the reading.
"""
