"""A run that starts from another run's weights: what fits is loaded, and what does not is named."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from short_runs import metrics, same_result, short_config, short_train

from atlas_wm.errors import Interrupted, UserError
from atlas_wm.models.world_model import WorldModel
from atlas_wm.runs.files import write_tensors
from atlas_wm.runs.folder import read_run
from atlas_wm.runs.model import absolute_source, load_model, push_to_hub
from atlas_wm.train.start import initialise

pytestmark = pytest.mark.usefixtures("one_thread")


def still(**changes):
    """Settings of a run whose weights do not move."""
    config = short_config(steps=1, batchnorm_batches=0, **changes)
    return replace(config, train=replace(config.train, lr=1e-30, weight_decay=0.0))


def parameters(run):
    return {name: t for name, t in load_file(run / "model.safetensors").items() if ".running_" not in name}


def test_the_same_architecture_loads_everything(dataset_path, undisturbed, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run = short_train(still(seed=7), dataset_path, tmp_path / "run", init=undisturbed)
    count = len(load_file(undisturbed / "model.safetensors"))
    assert f"loaded {count} of {count} tensors from {undisturbed}" in caplog.messages
    found, expected = parameters(run), parameters(undisturbed)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-20)
    assert read_run(run)[0].init == str(undisturbed)
    without = short_train(still(seed=7), dataset_path, tmp_path / "without")
    assert read_run(without)[0].init is None
    name = "encoder.vit.patch_embed.proj.weight"
    assert not torch.equal(parameters(without)[name], expected[name])


def test_the_model_of_the_package_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_model(absolute_source("demo")).run.task == "tworoom"


def test_another_action_size_loads_all_but_the_action_layers(caplog):
    config = short_config().model
    source, model = WorldModel(config, 2), WorldModel(config, 5)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with caplog.at_level(logging.INFO):
        initialise(model, source.state_dict(), "runs/other")
    other = {name for name, t in source.state_dict().items() if t.shape != before[name].shape}
    assert other and all("action" in name for name in other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in other else source.state_dict()[name])
    (message,) = caplog.messages
    assert message.startswith(
        f"loaded {len(before) - len(other)} of {len(before)} tensors from runs/other; not loaded"
    )
    for name in other:
        here, there = (tuple(t[name].shape) for t in (before, source.state_dict()))
        assert f"{name} ({here} here, {there} there)" in message


def test_a_missing_and_an_additional_part_are_named(caplog):
    config = short_config().model
    with caplog.at_level(logging.INFO):
        initialise(WorldModel(config, 2), WorldModel(replace(config, inverse_hidden=4), 2).state_dict(), "x")
        initialise(WorldModel(replace(config, inverse_hidden=4), 2), WorldModel(config, 2).state_dict(), "x")
    more, fewer = caplog.messages
    assert "(none here, (" in more and ") here, none there)" in fewer and "inverse" in more and "inverse" in fewer


def test_nothing_in_common_is_an_error():
    config = short_config().model
    model = WorldModel(config, 2)
    source = {f"other.{name}": tensor for name, tensor in model.state_dict().items()}
    source["projector.norm.num_batches_tracked"] = torch.tensor(3)  # a counter is no weight
    with pytest.raises(UserError, match=r"--init runs/x: none of its \d+ tensors has the name and shape"):
        initialise(model, source, "runs/x")


def test_there_is_no_such_run(dataset_path, tmp_path):
    with pytest.raises(UserError, match="there is no run folder"):
        short_train(still(), dataset_path, tmp_path / "run", init=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_the_random_streams_stay_those_of_the_seed(dataset_path, undisturbed, tmp_path):
    """Started from a copy of its own first weights, a run is the run without --init."""
    first = short_train(still(), dataset_path, tmp_path / "first")
    plain = short_train(short_config(steps=10), dataset_path, tmp_path / "plain")
    torch.manual_seed(short_config().train.seed)
    model = WorldModel(short_config().model, 2)
    write_tensors(first / "model.safetensors", model.state_dict())
    again = short_train(short_config(steps=10), dataset_path, tmp_path / "again", init=first)
    assert same_result(plain, again)


def test_resumed_after_init_it_ends_with_the_same_bits(dataset_path, undisturbed, tmp_path):
    """The checkpoint has the weights: the run they came from is not needed any more."""
    config = short_config(steps=20, log_every=5)
    source = shutil.copytree(undisturbed, tmp_path / "source")
    whole = short_train(config, dataset_path, tmp_path / "whole", init=source)

    def stop(progress):
        if progress.step == 10:
            raise Interrupted("here", 15)

    with pytest.raises(Interrupted):
        short_train(config, dataset_path, tmp_path / "run", init=source, on_progress=stop)
    with pytest.raises(UserError, match=r"init was .*source, is None"):
        short_train(config, dataset_path, tmp_path / "run")
    shutil.rmtree(source)
    run = short_train(config, dataset_path, tmp_path / "run", init=source)
    assert same_result(whole, run) and metrics(run)[-1]["step"] == "20"


def test_the_hub_gets_the_name_of_a_local_run_alone(undisturbed, monkeypatch):
    from atlas_wm.runs import model as module

    published = {}

    def publish(folder, repo_id, private):
        published.update(json.loads((folder / "config.json").read_text()))
        return "there"

    monkeypatch.setattr(module, "publish", publish)
    loaded = module.load_model(undisturbed)
    for init, shown in [("/home/me/runs/secret", "secret"), ("user/name", "user/name"), (None, None)]:
        loaded.run = replace(loaded.run, init=init)
        push_to_hub(loaded, "user/x")
        assert published["init"] == shown
