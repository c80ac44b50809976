// Package safetensors turns files of named tensors into memory and back.
//
// A file is eight bytes of length, a JSON header, and the tensors' bytes, little-endian and row by
// row. [Open] takes such a file, or the folder or index of a model split into many of them, and
// gives one [Set] of names, whatever the number of files. Opening reads headers only:
//
//	set, err := safetensors.Open("Llama-3.1-8B")
//	if err != nil {
//		return err
//	}
//	defer set.Close()
//	w, err := set.Tensor("model.embed_tokens.weight")
//	...
//	view, err := w.Bytes()                   // no copy; valid until Close
//	err = w.ReadSlice(buf, start, size)      // a copy of one box of the tensor
//
// # What is refused
//
// Weights come from strangers, so the header is believed in nothing. Its length, every offset and
// every shape are checked against the file before memory is asked for; tensors must cover the
// data without overlap, hole or tail; names must be unique, printable and at most 4,096 bytes.
// Where the reference library tolerates what its format forbids (blanks before the header,
// doubled names, unknown fields), this package does not: every file it takes, the reference takes
// with the same meaning, but not the reverse. A folder's shards must be plain files inside the
// folder; links that leave it are refused, except inside a Hugging Face cache, where they lead from
// snapshots to blobs of the same repository.
//
// # Mapped memory
//
// [Tensor.Bytes] is a view into the mapped file. It must not be used after [Set.Close], and not
// be kept where Close cannot see it: the memory is gone, and reading it ends the process. The
// same happens when another program shortens the file while a view is read (the system sends
// SIGBUS). Where that can happen, as on a network disk that others write, use [Tensor.ReadAt] or
// [Tensor.ReadSlice]: they read through the file and answer with an error.
//
// # Writing
//
// [WriteFile] and [WriteFolder] stream tensors to disk and put the file in place when it is whole.
// The same tensors give the same bytes, and they are the bytes that the reference library writes:
// wider element types first, so that every tensor is aligned though the format allows no padding,
// then by name.
package safetensors
