#!/bin/sh
# Drafts, calibration and acceptance in one go. usage: training/run_all.sh CORPUS OUT
set -eu
corpus=$1 out=$2
python3 -m training.drafts --kind dflash --steps 9000 --seconds 125 --corpus "$corpus" --out "$out"
python3 -m training.drafts --kind dspark --ce-share 0.7 --steps 14000 --seconds 165 --seed 1 \
    --corpus "$corpus" --out "$out"
python3 -m training.sts --draft "$out/k3-nano-dspark" --corpus "$corpus"
python3 -m training.acceptance --draft "$out/k3-nano-dflash" "$out/k3-nano-dspark" | tee "$out/acceptance.txt"
