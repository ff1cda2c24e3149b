"""The example of cluster_logistic.py, launched by Spark on its executors.

pip install pyspark
spark-submit examples/cluster_spark.py
"""

from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    script = Path(__file__).with_name("cluster_logistic.py")
    # On a cluster, set local_mode=False and keep the journal on a disk of rank 0's machine.
    TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(str(script))
    spark.stop()
