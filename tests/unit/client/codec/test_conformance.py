"""The conformance vectors: written by their program, and met by the client of this repository."""

import copy
import importlib.util
import json
import sys

import pytest

from support.repository.conformance import DATASETS, PROTO, VECTORS, array, assert_met
from warpfit import codec, parse, search_codec
from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss, Precision
from warpfit.searching import DEFAULT_OPERATORS


def generator():
    spec = importlib.util.spec_from_file_location("make_conformance", PROTO / "make_conformance.py")
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


def assert_same(got, wanted):
    """Equal, but for the last bits of results, which differ between builds of NumPy."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name, numbers in wanted.pop("expected", {}).items():
            found = got["expected"][name]
            assert (found is None) == (numbers is None)
            assert found is None or assert_met(array(found), numbers, 1e-13) is None
        for key, value in wanted.items():
            assert_same(got[key], value)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


def test_the_file_is_what_its_program_writes():
    module = generator()
    assert_same(json.loads(module.render(module.document())), copy.deepcopy(VECTORS))


def test_operators_are_those_of_the_table():
    # Codes are a contract with every client ever built: a new name comes last.
    listed = {(op["code"], op["name"], op["arity"]) for op in VECTORS["operators"]}
    assert listed == {(op.code, op.name, op.arity) for op in OPERATORS.values()}
    programs = [program for case in VECTORS["evaluations"] for program in case["programs"]]
    tried = {token[0] for program in programs for token in program["tokens"]}
    assert tried >= {op.code for op in OPERATORS.values()}


def dataset_of(name):
    described = DATASETS[name]
    columns = (described[key] and array(described[key]) for key in ("target", "weights"))
    kind = {key: described[key] for key in ("names", "dtype")}
    return Dataset.of(array(described["variables"]).T, *columns, **kind)


@pytest.mark.parametrize("name", DATASETS)
def test_uploads_byte_for_byte(name):
    dataset = dataset_of(name)
    assert dataset.content_id.hex() == DATASETS[name]["content_id"]
    sent = [bytes(message).hex() for message in codec.upload_messages(dataset, 1 << 20)]
    assert sent == DATASETS[name]["upload"]


@pytest.mark.parametrize("case", VECTORS["searches"], ids=lambda case: case["name"])
def test_searches_are_read_as_they_are_meant(case):
    message = search_codec.search_from_bytes(bytes.fromhex(case["request"]))
    request, settings = search_codec.search_from_message(message), case["settings"]
    assert request.max_generations == int(settings["max_generations"])
    assert request.operators == settings.get("operators", dict.fromkeys(DEFAULT_OPERATORS, 1.0))
    rules = settings.get("rules", {})
    assert request.rules.max_size == rules.get("max_size", 25)
    assert request.rules.counts == rules.get("counts", {})
    assert request.pairs is not settings.get("no_pairs", False)
    request.check(dataset_of(case["dataset"]).layout)


@pytest.mark.parametrize("case", VECTORS["evaluations"], ids=lambda case: case["name"])
def test_requests_byte_for_byte(case):
    programs = [Program(*zip(*program["tokens"], strict=True)) for program in case["programs"]]
    assert programs == [parse(program["text"]) for program in case["programs"]]
    numbers = (array(program["parameters"]) for program in case["programs"])
    batch = Batch.of(programs, [each.reshape(case["vectors"], -1) for each in numbers])
    data = bytes.fromhex(DATASETS[case["dataset"]]["content_id"])
    asked = {"precision": Precision(case["precision"]), "values": case["values"]}
    asked |= {"loss": case["loss"] and Loss(case["loss"])}
    evaluation = Evaluation(data, batch, case["rows"] and tuple(case["rows"]), **asked)
    assert codec.evaluation_to_message(evaluation).SerializeToString().hex() == case["request"]
