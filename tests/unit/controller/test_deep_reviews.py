"""ConversionReviews with objects that nest too deep to be parsed: they hinder no other object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doubles import second_version
from sharepod.api.versions.conversion_review import ReviewError
from sharepod.controller import deep_reviews
from sharepod.controller.deep_reviews import deep_answer

Json = dict[str, Any]

KINDS = second_version.kinds()
DEEP = '{"f:a":' * 9_000 + "{}" + "}" * 9_000


def sharepod(name: str, *, spec: str = '{"gpu":{"request":0.4}}', fields: str = "{}", version: str = "v1alpha1") -> str:
    metadata = f'{{"managedFields":[{{"fieldsV1":{fields}}}],"name":"{name}","namespace":"team","uid":"u-{name}"}}'
    return f'{{"apiVersion":"sharepod.dev/{version}","kind":"SharePod","metadata":{metadata},"spec":{spec}}}'


def review(*objects: str, to: str = "sharepod.dev/v1test") -> str:
    request = f'{{"uid":"r-1","desiredAPIVersion":"{to}","objects":[{",".join(objects)}]}}'
    return f'{{"kind":"ConversionReview","apiVersion":"apiextensions.k8s.io/v1","request":{request}}}'


@pytest.mark.promise("operator-conversion-deep")
def test_fields_of_a_manager_that_nest_too_deep_are_passed_over_and_the_object_is_converted() -> None:
    text, why = deep_answer(review(sharepod("a"), sharepod("deep", fields=DEEP), sharepod("b")), KINDS)
    response = json.loads(text)["response"]
    assert (response["uid"], response["result"], why) == ("r-1", {"status": "Success"}, "")
    converted = response["convertedObjects"]
    assert [item["metadata"]["name"] for item in converted] == ["a", "deep", "b"]
    assert {item["apiVersion"] for item in converted} == {"sharepod.dev/v1test"}
    assert [item["spec"]["gpu"]["guaranteed"] for item in converted] == [0.4, 0.4, 0.4]


@pytest.mark.promise("operator-conversion-deep")
@pytest.mark.parametrize("depth", [300, 700, 9_000])
def test_a_body_that_nests_too_deep_passes_as_it_is_in_the_version_that_was_asked_for(depth: int) -> None:
    spec = f'{{"gpu":{{"request":0.4}},"overhead":{{"cpu":{"[" * depth}{"]" * depth}}}}}'
    text, why = deep_answer(review(sharepod("a"), sharepod("deep", spec=spec)), KINDS)
    assert why == ""
    passed = sharepod("deep", spec=spec, version="v1test")
    assert text.endswith(f",{passed}]}}}}")
    rest = json.loads(text.replace(passed, "null"))
    assert rest["response"]["convertedObjects"][0]["spec"]["gpu"]["guaranteed"] == 0.4


def test_an_object_that_no_version_is_known_of_is_named_however_deep_it_nests() -> None:
    for spec in ('{"gpu":{}}', DEEP):
        text, why = deep_answer(review(sharepod("deep", spec=spec, fields=DEEP, version="v9")), KINDS)
        response = json.loads(text)["response"]
        assert response["result"]["status"] == "Failure"
        assert response["result"]["message"] == why
        assert response["convertedObjects"] == []
        assert "SharePod team/deep: no conversion from SharePod of sharepod.dev/v9" in why


def test_what_is_no_review_is_refused() -> None:
    with pytest.raises(ReviewError, match="request is missing"):
        deep_answer(f'{{"kind":{DEEP}}}', KINDS)
    with pytest.raises(ReviewError, match="objects is missing"):
        deep_answer(f'{{"kind":1,"request":{{"uid":"a"}},"x":{DEEP}}}'.replace(DEEP, "1"), KINDS)
    with pytest.raises(ReviewError, match="ConversionReview"):
        deep_answer(review(sharepod("a", fields=DEEP)).replace("ConversionReview", "Other"), KINDS)
    with pytest.raises(ValueError):
        deep_answer(DEEP, KINDS)


def test_a_review_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_reviews, "MOST_PARTS", 100)
    with pytest.raises(ReviewError, match="more than 100 parts"):
        deep_answer(review(*(sharepod(f"n{number}", fields=DEEP) for number in range(30))), KINDS)
