"""Mistakes in the images of a file's Ray pods. One cause is one finding, whatever the number of pods and manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raytf.doctor.check import kube_pods, versions
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, Severity, error, warning
from raytf.doctor.local_environment import Surroundings

#: Findings about an image with which no pod starts. Any other image works, but not with raytf or not reliably.
_NEVER_STARTS = ("image-name", "image-retired")


@dataclass(frozen=True)
class PodImage:
    """The image of the first container of a group of pods, which is Ray's."""

    name: str
    path: Path
    document: Document
    accelerator: str = ""

    @property
    def ray(self) -> str | None:
        """The version of Ray in an image that Ray publishes."""
        match = re.search(r"rayproject/ray[\w-]*:(\d+\.\d+\.\d+)", self.name)
        return match and match[1]

    @property
    def python(self) -> str | None:
        """The version of Python, MAJOR.MINOR, that the tag of Ray's image names."""
        return versions.python_tag(self.name)

    def advised(self, here: Surroundings) -> str:
        """Return the image of Ray to use instead."""
        return versions.advised_image(self.name, here, self.accelerator)


def of_group(document: Document, path: Path) -> list[PodImage]:
    """Return the image of a group of pods, or an empty list if it names none."""
    first: Path = (*path, "template", "spec", "containers", 0)
    name = document.get(*first, "image")
    limits = document.mapping(*first, "resources", "limits")
    accelerator = "gpu" if kube_pods.ACCELERATORS[0] in limits else ""
    return [PodImage(name, (*first, "image"), document, accelerator)] if isinstance(name, str) else []


#: The document, the path of the cluster in it, and the images of its pods, for each cluster of a file.
Clusters = Sequence[tuple[Document, Path, list[PodImage]]]


def check(clusters: Clusters, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find images that no pod can use, that have no raytf, or that do not match each other."""
    differing: list[PodImage] = []
    for document, _base, images in clusters:
        of_ray = [image for image in images if image.ray]
        for name, both in (("Ray", {i.ray for i in of_ray}), ("Python", {i.python for i in of_ray} - {None})):
            if len(both) > 1:
                differing += of_ray
                what = f"the groups' images have different versions of {name}: {', '.join(sorted(map(str, both)))}"
                why = f"Workers with another version of {name} never join."
                fix = _fixes(of_ray, clusters, here)
                yield _at(error("images-differ", images[-1].path, what, why, fix), document)
                break
    yield from _one_each([i for _, _, images in clusters for i in images if i not in differing], clusters, here)
    if not differing:
        yield from _ray_versions(clusters, here)


def _one_each(images: Sequence[PodImage], clusters: Clusters, here: Surroundings) -> Iterator[ConfigFinding]:
    """Yield one finding for each kind of mistake, which names all images with it."""
    by_code: dict[str, list[tuple[PodImage, ConfigFinding]]] = {}
    for image in images:
        for found in versions.image(image.name, image.path, here, image.accelerator):
            by_code.setdefault(found.code, []).append((image, found))
    for code, both in by_code.items():
        image, first = both[0]
        others = sorted({other.name for other, _ in both} - {image.name})
        severity = Severity.ERROR if code in _NEVER_STARTS else Severity.WARNING
        what = first.what + (f"; the same is true of {', '.join(others)}" if others else "")
        is_rays = "rayproject/" in image.name and code != "image-name"
        fix = _fixes([image for image, _ in both], clusters, here) if is_rays else first.fix
        yield _at(replace(first, severity=severity, what=what, fix=fix), image.document)


def _fixes(images: Sequence[PodImage], clusters: Clusters, here: Surroundings) -> str:
    """Return the advice which image to use instead of each other one, and which `rayVersion`."""
    pairs = {i.name: {j.advised(here) for j in images if j.name == i.name} for i in images}
    advised = sorted({new for news in pairs.values() for new in news})
    if len(advised) == 1:
        text = f"Use {advised[0]}"
    else:
        parts = [
            f"{new} instead of {old}{' in pods with GPUs' if len(news) > 1 and '-gpu' in new else ''}"
            for old, news in pairs.items()
            for new in sorted(news)
            if new != old
        ]
        text = f"Use {', and '.join(parts)}"
    is_other = any(document.get(*base, "rayVersion") not in (None, here.ray) for document, base, _ in clusters)
    return f"{text}{f', and write rayVersion: {here.ray}' if is_other else ''}."


def _ray_versions(clusters: Clusters, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find the first `rayVersion` that its images contradict, or that no image explains and that raytf cannot use."""
    for document, base, images in clusters:
        path: Path = (*base, "rayVersion")
        version, rays = document.get(*path), {image.ray for image in images} - {None}
        if not isinstance(version, str) or not re.fullmatch(r"\d+\.\d+\.\d+", version) or version == here.ray:
            continue
        if here.ray in rays:
            what = f"rayVersion is {version}, but the images have Ray {here.ray}"
            why = "The operator writes commands for a version other than the one that runs."
            yield _at(warning("image-ray-version", path, what, why, f"Write rayVersion: {here.ray}."), document)
        elif not rays and not any("rayproject/" in image.name for image in images):
            what, fix = f"rayVersion is {version}", f"Use images with Ray {here.ray}, and rayVersion: {here.ray}."
            why = f"raytf needs Ray {here.ray}, which you have here; Ray refuses a driver of another version."
            yield _at(warning("ray-version", path, what, why, fix), document)
        else:
            continue
        return


def _at(found: ConfigFinding, document: Document) -> ConfigFinding:
    return replace(found, line=document.line(found.path))
