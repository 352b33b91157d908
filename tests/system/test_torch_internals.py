"""The private parts of torch that posbench reaches exist and do what they did."""
