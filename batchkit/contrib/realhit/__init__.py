"""RealHiTBench: its scorers, its charts in a sandbox, and the files of its harness."""
