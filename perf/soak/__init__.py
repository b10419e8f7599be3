"""Hours of mixed load with faults, those of tests/crash: does anything get lost, and does anything grow?"""
