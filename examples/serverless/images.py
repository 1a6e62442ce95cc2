"""Uploads images: stores a job for each image.

python -m examples.serverless.images shop --images 12
"""

from __future__ import annotations

import argparse

import windrow

QUEUE = "thumbnails"
KIND = "make_thumbnail"


def main() -> None:
    parser = argparse.ArgumentParser(description="Uploads images.")
    parser.add_argument("org")
    parser.add_argument("--images", type=int, default=12, metavar="N", help="default: 12")
    given = parser.parse_args()
    with windrow.SyncClient(org=given.org) as client:
        client.enqueue_many(windrow.NewJob(QUEUE, KIND, {"image": number}) for number in range(given.images))
    print(f"{given.images} images are uploaded")


if __name__ == "__main__":
    main()
