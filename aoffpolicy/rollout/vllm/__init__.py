"""Rollouts on vLLM (0.23 and 0.32 onwards, on CPU, CUDA and Ascend).

`engine` and `receivers` run in our rollout worker, beside the `AsyncLLM`; `plugin`, `transfer` and `member` run in each
of vLLM's own workers, which are the members of the weight group. `arguments` turns the config into engine arguments.
"""
