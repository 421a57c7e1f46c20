"""Pathfinder: are two circles joined by a dashed path (Linsley et al., 2018; at 32 x 32 and 128 x 128 in LRA)?

A picture has two long paths of dashes that start near each other, and short distractor paths. Circles mark two ends:
both of one path (label 1), or the start of one and the end of the other (label 0). The numbers of dashes are those of
the hardest published set: 14, and a third of that in the distractors. Pictures of 16 x 16 are an easier task of our
own, with three dashes close together and no distractors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

# Pictures are drawn larger by this factor, and then averaged.
SUPERSAMPLING = 4
# Numbers of attempts for a dash, for a path from its start, and for a second path.
DASH_TRIALS, PATH_TRIALS, PAIR_TRIALS = 4, 10, 4


@dataclass(frozen=True)
class Geometry:
    """Sizes in pixels."""

    side: int
    dash: float
    gap: float
    thickness: float
    clearance: float  # between the axes of two paths, or of two dashes that do not follow each other
    radius: float  # of the circles
    distractors: int  # largest number of paths of a third of the length
    dashes: int = 14  # of a long path
    turn: float = 0.35  # standard deviation of the angle between two dashes, in radians


GEOMETRIES = {
    16: Geometry(16, dash=2.0, gap=0.5, thickness=1.0, clearance=2.0, radius=1.3, distractors=0, dashes=3),
    32: Geometry(32, dash=1.5, gap=1.0, thickness=0.7, clearance=2.0, radius=1.3, distractors=4),
    128: Geometry(128, dash=5.0, gap=3.0, thickness=1.6, clearance=5.0, radius=3.0, distractors=14),
}


def samples(count: int, seed: int, side: int) -> Iterator[dict]:
    """`count` samples, each with `pixels` (`side^2` grey values 0 to 255 in row order) and `label`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        label = int(rng.integers(2))
        yield {"pixels": draw_sample(rng, GEOMETRIES[side], label).flatten().tolist(), "label": label}


def draw_sample(rng: np.random.Generator, geometry: Geometry, label: int) -> np.ndarray:
    """One picture, `(side, side)` uint8."""
    pair = None
    while pair is None:
        pair = two_paths(rng, geometry)
    paths = list(pair)
    for _ in range(geometry.distractors):
        short = grow_path(rng, geometry, geometry.dashes // 3, None, paths)
        if short is not None:
            paths.append(short)
    first, second = pair if rng.integers(2) else pair[::-1]
    ends = (first[0, 0], first[-1, 1] if label else second[-1, 1])
    return render(geometry, paths, ends)


def two_paths(rng: np.random.Generator, geometry: Geometry) -> tuple[np.ndarray, np.ndarray] | None:
    """Two long paths whose starts are at most a quarter of the side apart, or None if there was no room."""
    first = grow_path(rng, geometry, geometry.dashes, None, [])
    if first is None:
        return None
    for _ in range(PAIR_TRIALS):
        angle, distance = rng.uniform(0, 2 * math.pi), rng.uniform(0.12, 0.25) * geometry.side
        start = first[0, 0] + distance * np.array([math.cos(angle), math.sin(angle)])
        second = grow_path(rng, geometry, geometry.dashes, start, [first])
        if second is not None:
            return first, second
    return None


def grow_path(rng, geometry: Geometry, dashes: int, start: np.ndarray | None, others: list) -> np.ndarray | None:
    """The ends of each dash of a path from `start` that touches no others, `(dashes, 2, 2)`; None without room."""
    occupied = np.concatenate([np.zeros((0, 2)), *(points_on(path, geometry) for path in others)])
    border = geometry.radius + 1
    for _ in range(PATH_TRIALS):
        tip = rng.uniform(border, geometry.side - border, 2) if start is None else start
        if not border < tip.min() <= tip.max() < geometry.side - border:
            return None
        angle, path = rng.uniform(0, 2 * math.pi), []
        while len(path) < dashes:
            dash = next_dash(rng, geometry, tip, angle, path, occupied)
            if dash is None:
                break
            angle = math.atan2(*(dash[1] - dash[0])[::-1])
            tip = dash[1] + geometry.gap * np.array([math.cos(angle), math.sin(angle)])
            path.append(dash)
        if len(path) == dashes:
            return np.array(path)
    return None


def next_dash(rng, geometry: Geometry, tip: np.ndarray, angle: float, path: list, occupied) -> np.ndarray | None:
    """A dash from `tip` with a small turn that touches nothing, `(2, 2)`, or None if there was no room."""
    taken = np.concatenate([occupied, points_on(np.array(path[:-1]).reshape(-1, 2, 2), geometry)])
    border = geometry.radius + 1
    for _ in range(DASH_TRIALS):
        direction = angle + rng.normal(0, geometry.turn)
        end = tip + geometry.dash * np.array([math.cos(direction), math.sin(direction)])
        dash = np.array([tip, end])
        if not border < end.min() <= end.max() < geometry.side - border:
            continue
        distances = points_on(dash[None], geometry)[:, None] - taken  # (points, taken, 2)
        if (np.square(distances).sum(axis=-1) >= geometry.clearance**2).all():
            return dash
    return None


def points_on(path: np.ndarray, geometry: Geometry) -> np.ndarray:
    """The points on the dashes of `path` `(K, 2, 2)`, about a pixel apart, `(K M, 2)`."""
    steps = np.linspace(0, 1, max(2, math.ceil(geometry.dash) + 1))[:, None]
    return (path[:, None, 0] * (1 - steps) + path[:, None, 1] * steps).reshape(-1, 2)


def render(geometry: Geometry, paths: list[np.ndarray], circles: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    picture = Image.new("L", (geometry.side * SUPERSAMPLING,) * 2)
    draw = ImageDraw.Draw(picture)
    for dash in np.concatenate(paths):
        draw.line([tuple(end * SUPERSAMPLING) for end in dash], 255, round(geometry.thickness * SUPERSAMPLING))
    for centre in circles:
        low, high = (centre - geometry.radius) * SUPERSAMPLING, (centre + geometry.radius) * SUPERSAMPLING
        draw.ellipse([*low, *high], fill=255)
    return np.asarray(picture.resize((geometry.side,) * 2, Image.Resampling.BOX))
