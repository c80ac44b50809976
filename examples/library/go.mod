module example.com/library

go 1.26.0

require github.com/deepwell/deepwell v0.0.0

require (
	github.com/dsnet/compress v0.0.1 // indirect
	github.com/ebitengine/purego v0.11.2 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/pelletier/go-toml/v2 v2.4.3 // indirect
	github.com/pierrec/lz4/v4 v4.1.21 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/deepwell/deepwell => ../..
