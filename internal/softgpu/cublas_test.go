package softgpu_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestGEMMs(t *testing.T) {
	dir := minimal{library: "cublas", programs: []string{"gemmcheck"}}.build(t)
	for seed := range 3 {
		out, status := run(t, time.Minute, nil, dir, "gemmcheck", "check", fmt.Sprint(seed))
		if status != 0 {
			t.Errorf("seed %d: status %d\n%s", seed, status, out)
		}
	}
}

func TestGEMMsThatAreNotPlayedEndByName(t *testing.T) {
	dir := minimal{library: "cublas", programs: []string{"gemmcheck"}}.build(t)
	for _, tc := range []struct{ name, says string }{
		{"type", "cublasLtMatmul: data type 3 of A"},
		{"epilogue", "cublasLtMatmul: epilogue 152"},
		{"scale mode", "cublasLtMatmul: attribute a_scale_mode = 2"},
		{"pointer mode", "cublasLtMatmul: pointer mode 3"},
		{"amax", "cublasLtMatmul: attribute amax_d = 64"},
		{"compute", "cublasLtMatmul: compute type 72"},
		{"attribute", "cublasLt attribute 99 of a matmul descriptor"},
	} {
		out, status := run(t, time.Minute, nil, dir, "gemmcheck", "refuse", tc.name)
		if status != 86 || !strings.Contains(out, "softgpu: not played: "+tc.says) {
			t.Errorf("%s: status %d\n%s", tc.name, status, out)
		}
	}
}
