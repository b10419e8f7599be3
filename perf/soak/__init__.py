"""Hours of mixed load with faults: does anything get lost, and does anything grow?

    load     ``danube load`` as the load and its auditor; history read again
    store    where tiered storage goes, and how it fails
    watch    memory, descriptors, threads and disk, sampled; processes that end by themselves
    growth   robust slopes with confidence, and how much growth is allowed
    soak     one run from its start, or from where it was stopped, to its report

Faults are those of the crash check (``tests/crash``).
"""
