package capture_test

import (
	"fmt"
	"log"

	"github.com/deepwell/deepwell/capture"
)

// A model that transformers saved is opened, checked, and its first parameter read.
func ExampleOpen() {
	m, err := capture.Open("../model/testdata/llama3", capture.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	if err := m.Check(); err != nil {
		log.Fatal(err)
	}
	embed := m.Config.Params()[0]
	buf := make([]float32, embed.Size())
	if err := m.Read(&embed, buf); err != nil {
		log.Fatal(err)
	}
	fmt.Println(m.Name, m.Config.Arch, embed.Name, embed.Source)
	// Output: llama3 llama embed model.embed_tokens.weight
}
