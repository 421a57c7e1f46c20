"""Fields that every configuration takes, which the common tests of configurations set and read back."""

config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["TnnModel"],
    "id2label": {0: "one", 1: "other"},
    "label2id": {"one": 0, "other": 1},
    "problem_type": "regression",
}
