"""Hours of mixed load with faults: does anything get lost, and does anything grow?

    settings   what is asked for
    load       topics, producers and consumers, native and gRPC
    store      where tiered storage goes, and how it fails
    epoch      load and faults for some minutes, then drain, read, judge
    verdict    the offline checker over one epoch, in a process of its own
    sampling   memory, descriptors, threads and disk at one moment
    record     all samples, as columns
    watch      the thread that samples and notices what ended by itself
    slopes     robust slopes with confidence
    growth     which slopes there are and how much growth is allowed
    state      what a run that was stopped goes on from
    soak       one run from its start to its report
    report     the report as text

Clients, journals, faults and the checker are those of the crash check (``tests/crash``).
"""
