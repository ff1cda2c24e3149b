"""The example of cluster_logistic.py, launched by Ray Train.

pip install "ray[train]"
python examples/cluster_ray.py
"""

import cluster_logistic
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    """Ray has made the process group in each worker. The rest is unchanged."""
    cluster_logistic.main()


if __name__ == "__main__":
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
