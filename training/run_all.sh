#!/bin/sh
# Drafts, calibration and acceptance in one go. usage: training/run_all.sh CORPUS OUT
set -eu
corpus=$1 out=$2
python3 -m training.drafts --corpus "$corpus" --out "$out" --steps 9000 --seconds 125
python3 -m training.sts --draft "$out/k3-nano-dspark" --corpus "$corpus"
python3 -m training.acceptance --draft "$out/k3-nano-dflash" "$out/k3-nano-dspark" | tee "$out/acceptance.txt"
