package safetensors

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
)

// Options say how WriteFolder splits a model into files.
type Options struct {
	// MaxBytes bounds the tensor bytes of one file; 0 means one file. A tensor that is larger
	// has a file of its own.
	MaxBytes int64
	// Metadata is written into every file. transformers demands {"format": "pt"}.
	Metadata map[string]string
}

// WriteFolder writes a model as transformers reads it: model.safetensors, or
// model-00001-of-00003.safetensors and so on with an index that is written last. The tensors are
// dealt to files in the order of their names. A folder that holds a model already is refused:
// files of two models must never mix, and a crash between two of them would leave just that.
func WriteFolder(dir string, items []Item, opts Options) ([]File, error) {
	parts, err := splitFiles(items, opts)
	if err != nil {
		return nil, err
	}
	if err := vacant(dir); err != nil {
		return nil, unwritten(err, dir)
	}
	var files []File
	homes := map[string]string{}
	total := int64(0)
	for i, l := range parts {
		name := FileName(i, len(parts))
		f, err := l.writeFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		files = append(files, f)
		total += l.data
		for _, it := range l.items {
			homes[it.Name] = name
		}
	}
	if len(parts) > 1 {
		// The index is the mark of a whole model: the shards' names are on disk before it.
		err = atomicfile.Write(filepath.Join(dir, IndexName), Index(homes, total), 0o644)
	}
	return files, unwritten(err, dir)
}

// splitFiles distributes the items over files.
func splitFiles(items []Item, opts Options) ([]layout, error) {
	if opts.MaxBytes < 0 {
		return nil, diag.New(codeCaller, "files of at most %d bytes", opts.MaxBytes)
	}
	if err := check(items, opts.Metadata); err != nil {
		return nil, err
	}
	items = slices.Clone(items)
	lists.Sort(items, func(a, b Item) int { return strings.Compare(a.Name, b.Name) })
	var parts []layout
	first, held := 0, int64(0)
	cut := func(end int) error {
		l, err := arrange(items[first:end], opts.Metadata)
		parts, first, held = append(parts, l), end, 0
		return err
	}
	for i, it := range items {
		size, _ := span(it.Shape) // checked above
		if opts.MaxBytes > 0 && i > first && size > opts.MaxBytes-held {
			if err := cut(i); err != nil {
				return nil, err
			}
		}
		held += size
	}
	err := cut(len(items))
	return parts, err
}

func vacant(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(entries, func(e fs.DirEntry) bool {
		name := e.Name()
		return name == modelName+suffix || name == IndexName ||
			strings.HasPrefix(name, modelName+"-") && strings.HasSuffix(name, suffix)
	})
	if i >= 0 {
		return diag.New(codeCaller, "the folder holds %s already", entries[i].Name()).
			At("%s", dir).Try("write to an empty folder, or remove the files of the other model")
	}
	return nil
}

// FileName is what transformers calls the i-th of n files of a model.
func FileName(i, n int) string {
	if n == 1 {
		return modelName + suffix
	}
	return fmt.Sprintf("%s-%05d-of-%05d%s", modelName, i+1, n, suffix)
}

// IndexName is what transformers calls the map from tensors to files.
const IndexName = modelName + indexSuffix

// Index writes the map from tensors to files in the form of transformers: two spaces, sorted.
func Index(homes map[string]string, total int64) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n  \"metadata\": {\n    \"total_size\": %d\n  },\n  \"weight_map\": {", total)
	comma := ""
	for _, name := range slices.Sorted(maps.Keys(homes)) {
		fmt.Fprintf(&b, "%s\n    %s: %s", comma, encode(name), encode(homes[name]))
		comma = ","
	}
	b.WriteString("\n  }\n}\n")
	return b.Bytes()
}
