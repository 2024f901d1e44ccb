module @ADDRESS@/vectors

go 1.19
