"""Embeddings: a task of MTEB, and training with sentence-transformers, on bidirectional models."""

import pytest
import torch
from datasets import Dataset

from helpers.ecosystem import SENTENCES, Matrix
from modeling_tnn import TnnModel

heads = Matrix()


def retrieval(queries: list[str], corpus: list[str]):
    """A retrieval task of MTEB on local texts: the i-th query asks for the i-th text."""
    tasks = pytest.importorskip("mteb.abstasks")
    described = pytest.importorskip("mteb.abstasks.task_metadata").TaskMetadata(
        name="Local", description="Texts of this test.", dataset={"path": "local/texts", "revision": "1"},
        type="Retrieval", category="t2t", eval_langs=["eng-Latn"], main_score="ndcg_at_10",
    )  # fmt: skip

    class Local(tasks.AbsTaskRetrieval):
        metadata = described

        def load_data(self, **options):
            rows = {name: [{"id": f"{i}", "text": text, "title": ""} for i, text in enumerate(texts)]
                    for name, texts in (("queries", queries), ("corpus", corpus))}  # fmt: skip
            split = {name: Dataset.from_list(found) for name, found in rows.items()}
            split |= {"relevant_docs": {f"{i}": {f"{i}": 1} for i in range(len(queries))}, "top_ranked": None}
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return Local()


@heads(TnnModel)
def test_mteb(head, folder):
    """The score of a retrieval task is that of the cosines of the mean-pooled vectors."""
    library = pytest.importorskip("sentence_transformers")
    mteb = pytest.importorskip("mteb")
    encoder = library.SentenceTransformer(str(folder), device="cpu")
    queries = [SENTENCES[1][:4], SENTENCES[0][:20], SENTENCES[2][:5]]
    task = retrieval(queries, SENTENCES)
    found = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False).task_results[0].scores["test"][0]
    cosines = library.util.cos_sim(encoder.encode(queries), encoder.encode(SENTENCES))
    ranks = (cosines > cosines.diagonal()[:, None]).sum(1)  # (3,), 0 for the best
    assert set(ranks.tolist()) != {0}, "every query would score 1"
    assert found["ndcg_at_10"] == pytest.approx((1 / torch.log2(ranks + 2.0)).mean().item(), abs=1e-4)


@heads(TnnModel)
def test_sentence_transformers_training(head, folder, tmp_path):
    """Contrastive training brings pairs together, and what was trained is saved and loaded."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    encoder = library.SentenceTransformer(str(folder), device="cpu")
    pairs = Dataset.from_dict({"anchor": SENTENCES * 4, "positive": [text[::-1] for text in SENTENCES] * 4})
    args = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=12, per_device_train_batch_size=3, learning_rate=3e-3, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, batch_sampler="no_duplicates", seed=0,
    )  # fmt: skip
    loss = losses.MultipleNegativesRankingLoss(encoder)
    trainer = library.SentenceTransformerTrainer(encoder, args, train_dataset=pairs, loss=loss)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < 0.5 * logged[0], logged
    encoder.eval().save_pretrained(str(tmp_path / "encoder"))
    loaded = library.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    vectors = torch.from_numpy(loaded.encode(SENTENCES))
    torch.testing.assert_close(vectors, torch.from_numpy(encoder.encode(SENTENCES)))


def test_matrix_of_the_page():
    heads.check()
