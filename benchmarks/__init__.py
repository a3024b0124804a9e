"""Benchmarks: named workloads, measured into JSONL rows (`benchmarks.run`) and drawn from them (`benchmarks.plot`)."""
