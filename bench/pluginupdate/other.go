package main

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/plugin"
)

const (
	engineName  = "cuda13"
	packageName = "jax-cuda13-pjrt"
	libraryPath = "jax_plugins/xla_cuda13/xla_cuda_plugin.so" // in the wheel and in the tree
)

// An other is a plugin that is not pinned, as a process can open it: an engine's folder of its own,
// and a table of engines, laid over the one in the sources, that has its digest. An update of the
// sources would change the same lines. There is no other way past the digests.
type other struct {
	home, overlay, library string
}

// prepare copies the installed engines, puts the plugin of a wheel in place of the pinned one, and
// writes the table that pins it.
func prepare(ctx context.Context, engines string, pinned *plugin.Bundle, version, dir string) (
	*other, error) {
	o := &other{home: filepath.Join(dir, "home"), overlay: filepath.Join(dir, "overlay.json")}
	folder := filepath.Join(o.home, "engines", engineName)
	o.library = filepath.Join(folder, filepath.FromSlash(libraryPath))
	if err := os.RemoveAll(o.home); err != nil {
		return nil, err
	}
	for _, name := range []string{"cpu", engineName} {
		err := os.CopyFS(filepath.Join(o.home, "engines", name), os.DirFS(filepath.Join(engines, name)))
		if err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(filepath.Join(folder, "nvidia", "cu13", "bin", "ptxas"), 0o755); err != nil {
		return nil, err
	}
	wheel, err := download(ctx, version, dir)
	if err != nil {
		return nil, err
	}
	sum, size, err := extract(wheel, o.library)
	if err != nil {
		return nil, err
	}
	digest, err := rename(filepath.Join(folder, "manifest.json"), pinned.Version, version, sum, size)
	if err != nil {
		return nil, err
	}
	return o, overlay(o.overlay, dir, map[string]string{pinned.Digest: digest,
		`"` + pinned.Version + `"`: `"` + version + `"`})
}

// download has pip bring the wheel, unless it is there.
func download(ctx context.Context, version, dir string) (string, error) {
	pattern := filepath.Join(dir, strings.ReplaceAll(packageName, "-", "_")+"-"+version+"-*.whl")
	found, err := filepath.Glob(pattern)
	if err == nil && len(found) == 0 {
		cmd := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "-q", "--no-deps",
			"--only-binary=:all:", "-d", dir, packageName+"=="+version)
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			return "", fmt.Errorf("pip download %s==%s: %w", packageName, version, err)
		}
		found, err = filepath.Glob(pattern)
	}
	if err != nil {
		return "", err
	}
	if len(found) != 1 {
		return "", fmt.Errorf("%d wheels of version %s in %s", len(found), version, dir)
	}
	return found[0], nil
}

// extract writes the wheel's plugin to path, and gives its SHA-256 and size.
func extract(wheel, path string) (sum string, size int64, err error) {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = z.Close() }()
	in, err := z.Open(libraryPath)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(path)
	if err != nil {
		return "", 0, err
	}
	hash := sha256.New()
	size, err = io.Copy(io.MultiWriter(out, hash), in)
	if closed := out.Close(); err == nil {
		err = closed
	}
	return hex.EncodeToString(hash.Sum(nil)), size, err
}

// rename enters the other plugin in the manifest of an engine, and gives the digest of the tree.
func rename(path, before, after, sum string, size int64) (string, error) {
	var m struct {
		Version  int      `json:"version"`
		Engine   string   `json:"engine"`
		Packages []string `json:"packages"`
		Files    []struct {
			Path   string `json:"path"`
			SHA256 string `json:"sha256"`
			Bytes  int64  `json:"bytes"`
		} `json:"files"`
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return "", err
	}
	at := slices.Index(m.Packages, packageName+"=="+before)
	if at < 0 {
		return "", fmt.Errorf("%s has no %s %s", path, packageName, before)
	}
	m.Packages[at] = packageName + "==" + after
	hash := sha256.New()
	for i := range m.Files { // sorted by path
		f := &m.Files[i]
		if f.Path == libraryPath {
			f.SHA256, f.Bytes = sum, size
		}
		fmt.Fprintf(hash, "%s  %s\n", f.SHA256, f.Path)
	}
	if text, err = json.MarshalIndent(m, "", "  "); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), os.WriteFile(path, text, 0o644)
}

// overlay writes the sources that pin engines with other words, and the file that tells the go
// command to take them.
func overlay(path, dir string, words map[string]string) error {
	replace := map[string]string{}
	for _, name := range []string{"table.go", "wheels.json"} {
		source, err := filepath.Abs(filepath.Join("plugin", name))
		if err != nil {
			return err
		}
		text, err := os.ReadFile(source)
		if err != nil {
			return fmt.Errorf("run this in the root of the sources: %w", err)
		}
		changed := string(text)
		for before, after := range words {
			changed = strings.ReplaceAll(changed, before, after)
		}
		if changed == string(text) {
			return fmt.Errorf("%s does not pin what is installed", source)
		}
		replace[source] = filepath.Join(dir, name)
		if err := os.WriteFile(replace[source], []byte(changed), 0o644); err != nil {
			return err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}
