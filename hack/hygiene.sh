#!/usr/bin/env bash
# hygiene.sh: refuses addresses of package registries, paths of one machine and credentials in tracked files.
set -euo pipefail
cd "$(dirname "$0")/.."
hosts='py''pi\.org|python''hosted|proxy\.go''lang|sum\.go''lang|npm''js|crates\''.io|deb\.deb''ian\.org|repo1?\.mav''en'
paths='(^|[^A-Za-z0-9_.~/$}-])/(wo''rk|ro''ot|ho''me/[a-z]+)/'
secrets='BEGIN (RSA |EC )?PRIV''ATE KEY|AK''IA[0-9A-Z]{16}'
if git grep -nIE "$hosts|$paths|$secrets" -- . ':!LICENSE'; then
  echo "error: the lines above name a registry's host, a path of one machine or a credential" >&2
  exit 1
fi
