"""Routes of metrics: reports of trainers in, curves out."""
