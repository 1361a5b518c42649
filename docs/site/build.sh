#!/usr/bin/env bash
# Build the documents as a site: ARTIFACTS/site/index.html. A broken link or a page that the nav lacks is an error.
# The packages are those of requirements.txt beside this file, in .venv-docs; STACK's are not touched.
set -euo pipefail
here=docs/site out=${ARTIFACTS:-artifacts} venv=.venv-docs
if ! cmp -s "$here/requirements.txt" "$venv/.installed"; then
  echo "install $venv"
  rm -rf "$venv"
  base=${PYTHON:-python3} # that of the stack, where it is installed
  [[ -x $base ]] || base=python3
  "$base" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/.installed"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Pages, and what they link to: all text of the repository but the template's own files.
mkdir "$work/source"
git ls-files -z -- ':!template/templates' ':!template/project' ':!template/{{*' ':!docs/site' |
  while IFS= read -r -d '' file; do [[ ! -f $file ]] || printf '%s\0' "$file"; done |
  xargs -0 cp --parents -t "$work/source"
cp "$here/mkdocs.yml" "$work"
if ! "$venv/bin/mkdocs" build --strict --config-file "$work/mkdocs.yml" >"$work/log" 2>&1; then
  grep -E 'WARNING|ERROR|Aborted|Error' "$work/log" >&2 || cat "$work/log" >&2
  exit 1
fi
mkdir -p "$out"
rm -rf "$out/site"
mv "$work/site" "$out/site"
echo "$out/site/index.html"
