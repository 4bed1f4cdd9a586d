"""The hub of these tests, held against the real client of Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.support.servers.hub import TOKEN, Hub

FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 64, "sub/tokenizer.json": b"{}"}


def api(hub: Hub, token: str | bool = TOKEN) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def test_a_revision_is_resolved_to_its_commit(hub: Hub) -> None:
    first = hub.commit("org/resolved", FILES)
    second = hub.commit("org/resolved", {**FILES, "config.json": b"{}"})
    hub.commit("org/resolved", FILES, branch="other")
    assert first != second
    assert api(hub).model_info("org/resolved").sha == second
    assert api(hub).model_info("org/resolved", revision=first).sha == first
    assert [found.rfilename for found in api(hub).model_info("org/resolved").siblings or ()] == sorted(FILES)
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info("org/resolved", revision="nothing")


def test_files_are_downloaded_and_verified_by_the_real_client(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit("org/whole", FILES)
    one = hf_hub_download("org/whole", "model.safetensors", endpoint=hub.url, token=TOKEN, cache_dir=tmp_path / "one")
    assert Path(one).read_bytes() == FILES["model.safetensors"]
    assert commit in one
    folder = Path(snapshot_download("org/whole", endpoint=hub.url, token=TOKEN, cache_dir=tmp_path / "all"))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("org/whole", "nothing.json", endpoint=hub.url, token=TOKEN, cache_dir=tmp_path / "one")


def test_who_may_not_read_is_told_in_the_hubs_words(hub: Hub, tmp_path: Path) -> None:
    hub.commit("org/private", FILES)
    hub.repository("org/private").private = True
    hub.commit("org/gated", FILES)
    hub.repository("org/gated").gated = True
    assert api(hub).model_info("org/private").private
    for repo in ("org/private", "org/missing"):
        with pytest.raises(RepositoryNotFoundError):
            api(hub, token=False).model_info(repo)
    with pytest.raises(GatedRepoError):
        hf_hub_download("org/gated", "config.json", endpoint=hub.url, token=TOKEN, cache_dir=tmp_path)
    with pytest.raises(HfHubHTTPError, match="401"):
        api(hub, token="hf_expired").model_info("org/private")


def test_big_files_come_from_another_host_that_refuses_the_hubs_token(hub: Hub) -> None:
    hub.commit("org/big", FILES)
    headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=256-511"}
    url = f"{hub.url}/org/big/resolve/main/model.safetensors"
    redirect = httpx2.get(url, headers=headers)
    assert redirect.status_code == 302
    assert redirect.headers["Location"].startswith(hub.cdn_url)
    part = httpx2.get(redirect.headers["Location"], headers={"Range": "bytes=256-511"})
    assert (part.status_code, part.content) == (206, bytes(range(256)))
    assert httpx2.get(redirect.headers["Location"], headers=headers).status_code == 400


def test_the_real_client_takes_what_lies_in_xet_for_that(hub: Hub) -> None:
    commit = hub.commit("org/xet", FILES)
    hub.repository("org/xet").xet = True
    url = hf_hub_url("org/xet", "model.safetensors", endpoint=hub.url)
    found = get_hf_file_metadata(url, endpoint=hub.url, token=TOKEN).xet_file_data
    assert found is not None
    assert found.refresh_route == f"{hub.url}/api/models/org/xet/xet-read-token/{commit}"
    assert get_hf_file_metadata(url.replace("model.safetensors", "config.json"), token=TOKEN).xet_file_data is None
