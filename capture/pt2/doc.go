// Package pt2 turns the archive that torch.export.save writes into a typed program and its tensors.
//
//	archive, err := pt2.Open("model.pt2")
//	if err != nil {
//		return err
//	}
//	defer archive.Close()
//	for _, node := range archive.Program.Graph.Nodes {
//		switch weight, _ := node.Arg("weight"); weight := weight.(type) {
//		case pt2.Ref: ...
//		}
//	}
//	w, err := archive.Tensor("model.embed_tokens.weight")
//	...
//	err = w.Read(buf) // float32, row by row
//
// The program is the raw one: aten operators as the module called them, sizes as expressions in
// symbols, what every input is. Nothing is rewritten. Files of torch 2.9 to 2.15 are read (schema
// 8.14 to 8.20); a newer minor version is read as long as it has nothing unknown in an argument.
//
// # What is refused
//
// Archives come from strangers, and are believed in nothing. No pickle is opened, neither the
// sample inputs nor tensors that are stored so, no name in the archive is used as a path, and no
// entry is unpacked: all are stored as they are. Sizes, strides and offsets are checked against the
// storage before memory is asked for. Unknown keys are ignored, as the schema allows within a major
// version; unknown kinds of an argument are not, since they would change what the program says.
package pt2
