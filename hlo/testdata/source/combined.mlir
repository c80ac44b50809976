// Three neighbouring sums over two groups of four: the compiler makes one variadic all-reduce of them.
module @combined attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%x: tensor<256x256xf32>, %y: tensor<128xf32>, %z: tensor<64x32xf32>) -> (tensor<256x256xf32>, tensor<128xf32>, tensor<64x32xf32>) {
    %0 = "stablehlo.all_reduce"(%x) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0,1,2,3],[4,5,6,7]]> : tensor<2x4xi64>} : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %1 = "stablehlo.all_reduce"(%y) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0,1,2,3],[4,5,6,7]]> : tensor<2x4xi64>} : (tensor<128xf32>) -> tensor<128xf32>
    %2 = "stablehlo.all_reduce"(%z) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0,1,2,3],[4,5,6,7]]> : tensor<2x4xi64>} : (tensor<64x32xf32>) -> tensor<64x32xf32>
    return %0, %1, %2 : tensor<256x256xf32>, tensor<128xf32>, tensor<64x32xf32>
  }
}
