#!/usr/bin/env python3
"""Writes .ci/vulndb, the part of the Go vulnerability database that concerns this module.

    git clone https://github.com/golang/vulndb
    python3 .ci/vulndb.py vulndb "$(git -C vulndb log -1 --format=%cI)"

govulncheck asks the live database where it can be reached. CI may run where only package
registries can, so the records of our modules and of the standard library's recent releases are
committed: identifiers, affected versions, packages and symbols, not the prose. The database is
licensed CC-BY-4.0 by its contributors (https://go.dev/security/vuln/database).
"""
import json
import pathlib
import re
import subprocess
import sys

OLDEST_GO = (1, 25)  # fixes of the standard library older than this are in every Go we build with


def recent(entry):
    """Reports whether a standard-library entry has a range that a supported Go may be in."""
    for r in entry.get("ranges", []):
        events = r.get("events", [])
        fixed = [e["fixed"] for e in events if "fixed" in e]
        if len(fixed) < sum("introduced" in e for e in events):
            return True  # not fixed
        for v in fixed:
            if tuple(int(x) for x in re.findall(r"\d+", v)[:2]) >= OLDEST_GO:
                return True
    return False


def main():
    source, date = pathlib.Path(sys.argv[1]), sys.argv[2]
    out = pathlib.Path(__file__).parent / "vulndb"
    listed = subprocess.run(["go", "list", "-m", "-f", "{{.Path}}", "all"], check=True,
                            capture_output=True, text=True).stdout.split()
    ours = set(listed) | {"stdlib", "toolchain"}
    (out / "index").mkdir(parents=True, exist_ok=True)
    (out / "ID").mkdir(exist_ok=True)
    for old in out.glob("ID/*.json"):
        old.unlink()
    modules, vulns = {}, []
    for path in sorted(source.glob("data/osv/GO-*.json")):
        v = json.loads(path.read_text())
        v["modified"] = date  # the repository leaves it to the server to fill in
        kept = [a for a in v.get("affected", [])
                if a["package"]["name"] in ours
                and (a["package"]["name"] not in ("stdlib", "toolchain") or recent(a))]
        if not kept or v.get("withdrawn"):
            continue
        record = {k: v[k] for k in ("schema_version", "id", "modified", "published", "aliases",
                                    "summary") if k in v}
        record["affected"] = kept
        record["database_specific"] = v.get("database_specific", {})
        (out / "ID" / path.name).write_text(json.dumps(record, sort_keys=True) + "\n")
        vulns.append({"id": v["id"], "modified": v["modified"], "aliases": v.get("aliases", [])})
        for a in kept:
            fixed = [e["fixed"] for r in a.get("ranges", []) for e in r["events"] if "fixed" in e]
            row = {"id": v["id"], "modified": v["modified"]}
            if fixed:
                row["fixed"] = fixed[-1]
            entry = modules.setdefault(a["package"]["name"], [])
            if row["id"] not in [r["id"] for r in entry]:
                entry.append(row)
    index = {"db.json": {"modified": date}, "vulns.json": vulns,
             "modules.json": [{"path": p, "vulns": modules[p]} for p in sorted(modules)]}
    for name, value in index.items():
        (out / "index" / name).write_text(json.dumps(value, sort_keys=True, indent=1) + "\n")
    print(f"{len(vulns)} records for {len(modules)} modules, as of {date}")


main()
