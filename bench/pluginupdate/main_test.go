package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Names of functions are found between zero bytes, and nothing else is.
func TestNamesAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plugin.so")
	text := "\x7fELF\x00cuInit\x00cuda\x00ncclAllReduce\x00nvmlInit_v2\x00custom call\x00" +
		"cublasLtMatmul\x00"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	names, err := namesIn(path)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"cuInit", "cublasLtMatmul", "ncclAllReduce", "nvmlInit_v2"}
	if got := names.without(nil); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// A program is compared with itself: what is new in one may be old in another, and a program that
// one side did not compile says nothing.
func TestChangesAreOfPrograms(t *testing.T) {
	before := byProgram([]string{"p: opcode a", "p: opcode b", "q: opcode a", "r: opcode z"})
	after := byProgram([]string{"p: opcode a", "p: opcode c", "q: opcode a", "q: opcode b",
		"q: opcode c"})
	both, b, a := changed(before, after)
	if both != 2 || !slices.Equal(b, []string{"opcode b  (p)"}) ||
		!slices.Equal(a, []string{"opcode b  (q)", "opcode c  (2 programs)"}) {
		t.Errorf("%d programs, %q, %q", both, b, a)
	}
}

// A table that does not pin what is installed is an error: the other plugin would not be opened.
func TestOverlayNeedsThePinnedWords(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	dir := t.TempDir()
	path := filepath.Join(dir, "overlay.json")
	if err := overlay(path, dir, map[string]string{"no such digest": "x"}); err == nil {
		t.Error("no error")
	}
	err := overlay(path, dir, map[string]string{`"jax-cuda13-pjrt"`: "1", `"cuda13"`: "2"})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || strings.Count(string(text), dir) != 2 {
		t.Errorf("%s, %v", text, err)
	}
}

// What tests say of a change is printed once, whatever else they print.
func TestReasons(t *testing.T) {
	said := "noise\n    a_test.go:1: llama: DW3402 no rule for the call x\n" +
		"largest relative difference 1e-07\n" +
		"        softgpu: not played: function cuGraphAddMemcpyNode of libcuda.so.1\n"
	if got := reason.FindAllString(said, -1); len(got) != 2 {
		t.Errorf("got %q", got)
	}
}
