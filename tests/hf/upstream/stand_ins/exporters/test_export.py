"""In place of transformers' tests of its exporters, which the source archive lacks: one graph for a forward pass.

Exporting the decoding of a text is left out: the state of a TNN is not a pair of tensors that grows.
"""

import torch
from transformers.exporters import DynamoConfig, DynamoExporter


class ExportTesterMixin:
    """Over `all_model_classes`."""

    def test_export(self):
        """With `torch.export`, for one shape and for any batch: the program gives what the model gives."""
        for model_class in self.all_model_classes:
            for dynamic in (False, True):
                with self.subTest(f"{model_class.__name__}, dynamic={dynamic}"):
                    self.check_export(model_class, dynamic)

    def check_export(self, model_class, dynamic):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.use_cache = False
        torch.manual_seed(0)
        model = model_class(config).eval()
        program = DynamoExporter().export(model, inputs, config=DynamoConfig(dynamic=dynamic))
        batches = [inputs, {name: value[:5] for name, value in inputs.items()}] if dynamic else [inputs]
        for batch in batches:
            with torch.no_grad():
                torch.testing.assert_close(program(**batch)[0], model(**batch)[0], rtol=0, atol=1e-5)
