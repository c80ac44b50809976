package pt2_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/deepwell/deepwell/capture/pt2"
)

// The attention of an exported Llama, and one of its weights.
func Example() {
	packed, err := os.ReadFile("testdata/llama.pt2.gz")
	if err != nil {
		log.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		log.Fatal(err)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		log.Fatal(err)
	}
	archive, err := pt2.Parse("llama.pt2", data) // pt2.Open takes a path
	if err != nil {
		log.Fatal(err)
	}
	defer archive.Close()
	graph := archive.Program.Graph
	for _, node := range graph.Nodes {
		if node.Target != "dw.attention.default" {
			continue
		}
		scale, _ := node.Arg("scale")
		for _, out := range node.Outputs {
			v := graph.Values[string(out)]
			fmt.Printf("%s: %s%v scale %.3f, %s\n", node.Modules[3].Path, v.Type, v.Dims, scale, node.Source)
		}
	}
	w, err := archive.Tensor("lm_head.weight")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(w.Name, w.Shape(), w.Storage)
	// Output:
	// model.layers.0.self_attn: f32[s72 4 s38 8] scale 0.354, modeling_llama.py:257
	// model.layers.1.self_attn: f32[s72 4 s38 8] scale 0.354, modeling_llama.py:257
	// lm_head.weight f32[40,32] weights/weight_20
}
