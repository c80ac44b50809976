package pt2

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// An Archive is an open file.
type Archive struct {
	Program *Program
}

// Open reads the program and the list of tensors, and leaves the tensors' numbers in the file.
func Open(path string) (*Archive, error) {
	return nil, diag.New(diag.BadInput, "archives are not read yet").At("%s", path)
}

// Parse reads an archive in memory; name is what errors call it.
func Parse(name string, data []byte) (*Archive, error) {
	return nil, diag.New(diag.BadInput, "archives of %d bytes are not read yet", len(data)).
		At("%s", name)
}

// Close ends the use of the file.
func (a *Archive) Close() error { return nil }

// Tensor finds a parameter, buffer or constant by its full name.
func (a *Archive) Tensor(name string) (*Tensor, error) {
	return nil, diag.New(diag.BadInput, "there is no tensor %q", name)
}

// Tensors lists parameters, buffers and constants by name.
func (a *Archive) Tensors() []*Tensor { return nil }

// Tied lists the groups of names that are one tensor, each group in the order of the program's
// inputs: those with one storage, offset and shape. Where weights were not stored (meta device) it
// cannot be known, and no group is listed.
func (a *Archive) Tied() [][]string { return nil }

// A Tensor is a view of a storage.
type Tensor struct {
	Name    string
	Type    dtype.DType
	Dims    []int64
	Strides []int64 // in elements; 0 along an expanded dimension
	Offset  int64   // of the first element in the storage, in elements
	Storage string  // the entry, such as weight_3: tensors with equal ones share memory
	Param   bool    // a parameter, not a buffer or constant
	Meta    bool    // the program was exported without numbers: there is nothing to read
}

// Shape is the type and the dimensions.
func (t *Tensor) Shape() dtype.Shape { return dtype.Shape{Type: t.Type, Dims: t.Dims} }

// Read fills dst with the elements as float32, row by row; integers and flags are converted.
func (t *Tensor) Read(dst []float32) error {
	return diag.New(diag.BadInput, "%d numbers are not read yet", len(dst))
}

// Bytes gives the elements row by row in their own type, little-endian. It is a copy.
func (t *Tensor) Bytes() ([]byte, error) { return nil, t.Read(nil) }
