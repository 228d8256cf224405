#!/bin/sh
# Drafts, calibration, acceptance and verify times in one go. usage: training/run_all.sh CORPUS OUT
set -eu
corpus=$1 out=$2
python3 -m training.drafts --kind dflash --steps 8790 --corpus "$corpus" --out "$out"
python3 -m training.drafts --kind dspark --ce-share 0.7 --steps 10665 --seed 1 --corpus "$corpus" --out "$out"
python3 -m training.sts --draft "$out/k3-nano-dspark" --corpus "$corpus"
python3 -m training.acceptance --draft "$out/k3-nano-dflash" "$out/k3-nano-dspark" | tee "$out/acceptance.txt"
python3 -m training.verify_times --draft "$out/k3-nano-dspark" | tee "$out/verify_times.txt"
