package capture

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/safedir"
)

// repoName is what the Hub takes as the name of a repository (validate_repo_id of huggingface_hub
// 2.4): an optional organization, letters, digits and the signs - _ . within.
var repoName = regexp.MustCompile(
	`^([A-Za-z0-9_]([\w.-]{0,94}\w)?/)?[A-Za-z0-9_]([\w.-]{0,94}\w)?$`)

// revisionName is a branch, a tag or a commit. Slashes are allowed, as in refs/pr/1.
var revisionName = regexp.MustCompile(`^[A-Za-z0-9_][\w./-]{0,249}$`)

// looksLikeRepo reports whether a source has the form ORGANIZATION/NAME.
func looksLikeRepo(source string) bool {
	return strings.Count(source, "/") == 1 && validRepo(source) && !strings.HasSuffix(source, ".json")
}

func validRepo(name string) bool {
	return repoName.MatchString(name) && !strings.Contains(name, "--") && !strings.Contains(name, "..")
}

// repoOf reads the name of a repository's folder in the cache.
func repoOf(folder string) (string, bool) {
	name, ok := strings.CutPrefix(folder, "models--")
	name = strings.ReplaceAll(name, "--", "/")
	return name, ok && validRepo(name)
}

// cacheDir is where the Hugging Face libraries keep what they download.
func (o Options) cacheDir() (string, error) {
	for _, v := range []struct{ name, below string }{
		{"HF_HUB_CACHE", ""}, {"HUGGINGFACE_HUB_CACHE", ""}, {"HF_HOME", "hub"},
		{"XDG_CACHE_HOME", "huggingface/hub"}, {"HOME", ".cache/huggingface/hub"},
	} {
		if dir := o.Getenv(v.name); dir != "" {
			if rest, ok := strings.CutPrefix(dir, "~/"); ok {
				dir = filepath.Join(o.Getenv("HOME"), rest)
			}
			return filepath.Join(dir, filepath.FromSlash(v.below)), nil
		}
	}
	return "", diag.New(diag.ModelMissing, "there is no place for a Hugging Face cache").
		Because("none of HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HOME is set").
		Try("HF_HUB_CACHE=FOLDER deepwell ...")
}

// openHub finds ORG/NAME or ORG/NAME@REVISION in the cache: models--ORG--NAME/snapshots/COMMIT,
// where refs/REVISION holds the commit.
func openHub(name string, o Options) (*Model, error) {
	repo, revision, pinned := strings.Cut(name, "@")
	if !pinned {
		revision = "main"
	}
	if !validRepo(repo) {
		return nil, diag.New(diag.BadUsage, "%q is not the name of a repository", repo).
			Try("hf:ORGANIZATION/NAME, as on the page of the model")
	}
	if !revisionName.MatchString(revision) || strings.Contains(revision, "..") {
		return nil, diag.New(diag.BadUsage, "%q is not a branch, tag or commit", revision).
			Try("hf:%s", repo)
	}
	cache, err := o.cacheDir()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "models--"+strings.ReplaceAll(repo, "/", "--"))
	commit := resolve(dir, revision)
	if commit == "" {
		return nil, notCached(dir, repo, revision, pinned)
	}
	return openFolder(filepath.Join(dir, "snapshots", commit), repo, download(repo, revision, pinned))
}

// resolve gives the commit of a revision whose snapshot is in a repository's folder, or "".
func resolve(dir, revision string) string {
	commit := revision
	if f, err := safedir.Open(dir); err == nil {
		defer f.Close()
		if text, err := f.Read("refs/"+revision, 256); err == nil {
			commit = strings.TrimSpace(string(text))
		}
	}
	if !revisionName.MatchString(commit) || strings.ContainsAny(commit, `/\`) ||
		strings.Contains(commit, "..") {
		return ""
	}
	if info, err := os.Stat(filepath.Join(dir, "snapshots", commit)); err != nil || !info.IsDir() {
		return ""
	}
	return commit
}

// download is the command that brings a repository into the cache.
func download(repo, revision string, pinned bool) string {
	command := "hf download " + repo
	if pinned {
		command += " --revision " + revision
	}
	return command
}

// patterns keep a download to what is read: many repositories also hold the weights in other forms.
const patterns = `--include "*.safetensors" --include "*.json" --include "*.model"`

// notCached is the error for a repository that is not in the cache.
func notCached(dir, repo, revision string, pinned bool) error {
	what, command := repo, download(repo, revision, pinned)
	if pinned {
		what += "@" + revision
	}
	e := diag.New(diag.ModelMissing, "hf:%s is not in the Hugging Face cache", what).At("%s", dir)
	snapshots, _ := os.ReadDir(filepath.Join(dir, "snapshots"))
	if len(snapshots) > 0 && !pinned {
		e = e.Because("only other revisions are there, such as hf:%s@%s", repo, snapshots[0].Name())
	}
	return e.Try("%s", fmt.Sprintf("%s\nwith %s it fetches only what is read", command, patterns))
}
