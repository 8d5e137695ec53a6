"""Real `vllm serve` processes for tests: environment, small models, servers, clients, and transformers' answers to compare with.

Nothing here imports vLLM: the servers run in an environment of their own (`make vllm-cpu`).
"""
