package safetensors_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/safetensors"
)

// A file is written to memory and one column of a tensor is read back.
func Example() {
	matrix := []byte{
		1, 2, 3,
		4, 5, 6,
	}
	var file bytes.Buffer
	_, err := safetensors.Write(&file, []safetensors.Item{{
		Name:  "matrix",
		Shape: dtype.Shape{Type: dtype.U8, Dims: []int64{2, 3}},
		Data:  safetensors.FromBytes(matrix),
	}}, nil)
	if err != nil {
		log.Fatal(err)
	}

	set, err := safetensors.Parse("memory", file.Bytes())
	if err != nil {
		log.Fatal(err)
	}
	defer set.Close()
	t, err := set.Tensor("matrix")
	if err != nil {
		log.Fatal(err)
	}
	column := make([]byte, 2)
	if err := t.ReadSlice(column, []int64{0, 1}, []int64{2, 1}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(t.Name(), t.Shape(), column[0], column[1])
	// Output: matrix u8[2,3] 2 5
}
